"""The papers' own figures and tables, apart from what every report has: each study makes sections from rows."""
