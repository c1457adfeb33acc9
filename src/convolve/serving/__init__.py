"""HTTP serving: requests, dynamic batching, routes, the server and its web page."""
