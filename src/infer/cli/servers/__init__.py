"""Commands that start servers, and ask and stop them."""
