"""Drivers carry out the decisions of `glm5.rl.controller`."""
