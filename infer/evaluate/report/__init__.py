"""Results of an evaluation: report.json, the page, pictures, and comparisons of several reports."""
