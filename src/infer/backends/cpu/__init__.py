"""Every op as compiled commands for the CPU: `operations`. This module imports nothing, so that compiling loads no
torch.
"""
