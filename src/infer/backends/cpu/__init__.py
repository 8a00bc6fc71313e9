"""Every op as compiled commands for the CPU: `operations`. What compiles them loads no torch, and so nothing here."""
