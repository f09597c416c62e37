"""Report formats: terminal, HTML page, Markdown, JSON and CSV."""
