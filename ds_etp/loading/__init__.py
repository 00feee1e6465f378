"""Models whose experts are read from their files when it is known which part of them a rank needs."""
