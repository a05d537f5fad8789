"""Programs that are started by module name, as in python -m megarl.launcher.rollout."""
