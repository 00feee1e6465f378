"""What is made with torch's private functions. torch is no host: nothing of it is replaced."""
