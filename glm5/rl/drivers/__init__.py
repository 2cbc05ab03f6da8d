"""What carries out the decisions of `glm5.rl.controller`."""
