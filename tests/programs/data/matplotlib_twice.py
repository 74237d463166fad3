# needs: matplotlib
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

for name in ("one.png", "two.png"):
    figure, axes = plt.subplots()
    axes.bar(["a", "b"], [1, 2])
    figure.savefig(name)
    plt.close(figure)
import os

print(sorted(os.listdir(".")))
