"""What models there are, and what is in one."""
