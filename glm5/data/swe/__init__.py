"""SWE rows of mid-training (§2.3): repository files, issue, pull request and diff of a change as one document."""
