"""What is changed in accelerate, and why."""
