"""What the operating system gives: files, memory, processors, locks, other processes and the terminal."""
