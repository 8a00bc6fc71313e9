// Return the smallest contrast of a token with its background, for every mark that it may have.
(() => {
  const numbers = (text) => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
  const background = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement)
      layers.push(numbers(getComputedStyle(each).backgroundColor));
    return layers.reverse().reduce((below, [r, g, b, a]) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a)),
      [255, 255, 255]);
  };
  const luminance = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (element) => {
    const [a, b] = [numbers(getComputedStyle(element).color), background(element)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const found = [];
  for (const span of document.querySelectorAll('.answer .tokens :is(p, code) [data-i]')) {
    const before = span.className;
    for (const mark of ['', 'chosen-token', 'differs', 'first-other', 'branched', 'forced', 'chosen-token forced']) {
      for (let p = 0; p < 10; p++) {
        span.className = `t sampled p${p} ${mark}`;
        for (const each of [span, ...span.children]) found.push([contrast(each), span.className, each.className]);
      }
    }
    span.className = before;
  }
  if (!found.some(([, , name]) => name.startsWith('code-'))) throw new Error('there is no code');
  return found.sort((a, b) => a[0] - b[0])[0];
})()
