"""Commands about models: what is in their files, how well they predict, how fast they are."""
