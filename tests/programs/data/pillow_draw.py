# needs: PIL
from PIL import Image, ImageDraw

image = Image.new("RGB", (40, 20), "white")
ImageDraw.Draw(image).text((2, 2), "hi", fill="black")
image.save("a.png")
print(Image.open("a.png").size)
