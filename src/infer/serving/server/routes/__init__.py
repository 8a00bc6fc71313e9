"""The handlers of the routes, one file per API, each with its table `ROUTES`."""
