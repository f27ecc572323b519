"""The report: one page of HTML from a record."""
