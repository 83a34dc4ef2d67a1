// The animation of an empty conversation: a swarm of small lights, with lines between those that are near each other.

const LIGHT_COUNT = 46;
const MAX_LINE_PX = 92; // lights at a shorter distance are joined by a line

/** Draw on the canvas while it is shown. Users who prefer reduced motion see a still picture. */
export function animateLights(canvas) {
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
  const context = canvas.getContext("2d");
  const lights = Array.from({ length: LIGHT_COUNT }, (_, index) => makeLight(index));
  let before = 0;

  const draw = (now) => {
    if (!canvas.isConnected) return;
    // 30 frames a second are enough for slow motion
    if (now - before > 32 && canvas.offsetParent !== null) {
      before = now;
      drawOnce(canvas, context, lights, reducedMotion.matches ? 20_000 : now);
    }
    if (!reducedMotion.matches) requestAnimationFrame(draw);
  };
  requestAnimationFrame(draw);
  const again = () => requestAnimationFrame(draw);
  if (reducedMotion.matches) {
    document.addEventListener("themechange", again);
    new ResizeObserver(again).observe(canvas);
  }
}

/** The centre of a light's path and how it drifts; spread by the golden angle, denser in the middle. */
function makeLight(index) {
  const angle = index * 2.39996;
  const distance = Math.sqrt((index + 0.5) / LIGHT_COUNT);
  const pace = 0.00022 + 0.00013 * ((index * 7) % 5);
  return { angle, distance, pace, phase: index * 1.7, size: 1.1 + ((index * 5) % 7) * 0.28 };
}

function place(light, now, width, height) {
  const turn = light.angle + now * 0.00002;
  const sway = 11 * Math.sin(now * light.pace + light.phase);
  const rise = 9 * Math.cos(now * light.pace * 0.8 + light.phase * 2);
  return {
    x: width / 2 + Math.cos(turn) * light.distance * (width / 2 - 22) + sway,
    y: height / 2 + Math.sin(turn) * light.distance * (height / 2 - 20) + rise,
  };
}

function drawOnce(canvas, context, lights, now) {
  const ratio = Math.min(devicePixelRatio, 2);
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const color = getComputedStyle(canvas).color;
  const places = lights.map((light) => place(light, now, width, height));
  drawLines(context, places, color);
  lights.forEach((light, index) => drawLight(context, light, places[index], now, color));
}

function drawLines(context, places, color) {
  context.strokeStyle = color;
  context.lineWidth = 0.8;
  for (let one = 0; one < places.length; one += 1) {
    for (let other = one + 1; other < places.length; other += 1) {
      const apart = Math.hypot(places[one].x - places[other].x, places[one].y - places[other].y);
      if (apart > MAX_LINE_PX) continue;
      context.globalAlpha = 0.26 * (1 - apart / MAX_LINE_PX);
      context.beginPath();
      context.moveTo(places[one].x, places[one].y);
      context.lineTo(places[other].x, places[other].y);
      context.stroke();
    }
  }
}

function drawLight(context, light, { x, y }, now, color) {
  const glow = 0.62 + 0.38 * Math.sin(now * light.pace * 3 + light.phase);
  const halo = context.createRadialGradient(x, y, 0, x, y, light.size * 6);
  halo.addColorStop(0, color);
  halo.addColorStop(1, color.replace("rgb(", "rgba(").replace(")", ", 0)")); // "transparent" would fade to grey
  context.globalAlpha = 0.3 * glow;
  context.fillStyle = halo;
  context.beginPath();
  context.arc(x, y, light.size * 6, 0, 2 * Math.PI);
  context.fill();
  context.globalAlpha = 0.45 + 0.55 * glow;
  context.fillStyle = color;
  context.beginPath();
  context.arc(x, y, light.size, 0, 2 * Math.PI);
  context.fill();
}
