"""The gate behind every protocol: what a request may ask, and the budgets that are reserved for it."""
