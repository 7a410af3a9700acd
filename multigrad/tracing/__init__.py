"""`trace_gradients`: record the values and gradients of every op in a context, then print, plot or export
the trace.

Code belongs here if it runs only while a trace is open, or if it displays a trace. This file exports nothing.
"""
