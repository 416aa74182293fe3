"""The gate behind every protocol: checks of a request, and the budgets that are reserved for it."""
