"""The single controller: it holds ids, lengths, scalars and handles, and tells worker groups what to do. No token passes through it."""
