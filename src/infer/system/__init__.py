"""Services of the operating system: files, memory, processors, locks, other processes and the terminal."""
