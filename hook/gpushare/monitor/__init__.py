"""What containers use, and who uses more than the limit."""
