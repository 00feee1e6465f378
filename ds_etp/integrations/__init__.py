"""Ways to register ds_etp from inside a framework that starts the training script itself."""
