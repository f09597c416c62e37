"""One comparison as a terminal's table, a page, Markdown, and files for machines."""
