"""Files of requests in the format of OpenAI's Batch API, run through the server's own HTTP application.

`ferrule run-batch` and the router `batches` share these modules: `source` reads the lines of an input, `rows` checks
them and writes results, `drive` keeps a number of them in flight, `journal` keeps results on disk, and `local` calls
the application.
"""
