"""Every op as compiled commands for the CPU: `operations`.

This module imports nothing, so that a process that compiles loads no torch.
"""
