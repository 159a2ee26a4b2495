"""What is generated when the site is built: reference, errors, links, drawings."""
