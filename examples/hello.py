"""The smallest use: run a program that you do not trust, and look at what it did."""

import belljar

result = belljar.run("print('hello from the jar')")

print(result.stdout, end="")
print(f"status={result.status} exit_code={result.exit_code} backend={result.backend}")
