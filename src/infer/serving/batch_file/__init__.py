"""`infer batch`: a file of requests, and a file of results from which a killed run can continue."""
