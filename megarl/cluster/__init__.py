"""Ray: placement, worker groups with explicit methods, deadlines. The only room below the controller that knows Ray."""
