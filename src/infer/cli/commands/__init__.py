"""The work of each command but `infer chat`: answers, reports about models, servers."""
