"""The files of a model by the name that a user gives: folders, packages, and the hub's local cache."""
