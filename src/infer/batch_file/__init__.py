"""`infer batch`: a file of requests and a file of results, with which a killed run can continue."""
