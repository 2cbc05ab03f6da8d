"""Training: one loop; stages differ by their data and their loss."""
