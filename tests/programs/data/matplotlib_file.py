# needs: matplotlib
import matplotlib.pyplot as plt

plt.plot([1, 2, 3])
plt.title("prices")
plt.savefig("plot.png")
print(open("plot.png", "rb").read(4))
