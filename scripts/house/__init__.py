"""The counter of the project's size and of the code that a request passes."""
