"""Pictures and clips as files, tiles and marks, whichever target reads them."""
