"""Several processes that serve one model: which of them a request goes to, and what becomes of it when one dies."""
