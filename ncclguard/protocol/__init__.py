"""The agreement of the ranks as pure code, without clock, threads or I/O: promises, and what follows from them."""
