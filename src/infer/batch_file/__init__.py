"""`infer batch`: a file of requests and a file of results, which a run that was killed goes on with."""
