"""What a run must cost, from sizes alone: physical limits of its phases."""
