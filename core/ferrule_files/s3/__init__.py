"""Objects of S3 and of stores that speak its protocol: names, listings, downloads."""
