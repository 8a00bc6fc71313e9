"""What a model costs here: rates and memory (`speed`), and where the time of a step goes (`profile`)."""
