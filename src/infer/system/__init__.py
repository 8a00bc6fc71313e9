"""Services of the operating system, and what any room may need: files, memory, cores, processes, spellings."""
