"""Options of commands: declared, read, checked, and used to choose and load a model."""
