"""Chat templates: conversations to text, rendered in a process that a template cannot harm."""
