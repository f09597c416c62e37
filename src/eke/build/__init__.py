"""From a plan to torch objects: `build_x(plan, device)`, without environment or hidden state."""
