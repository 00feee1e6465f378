"""Whole parameters of a live engine, one at a time: to read them and to change them."""
