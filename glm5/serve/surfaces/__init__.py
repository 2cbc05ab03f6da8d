"""The APIs that the server speaks, one package each, and what their requests share."""
