"""The public surface of `infer`, found in its code: each module lists the rows of one kind of public thing."""
